"""A limit on the softmax weight that any row may lose, whatever the input."""

from blasst import blasst_attn_func
from blasst.testing import heavy_tailed_inputs


def main() -> None:
    # Keys of cold blocks lie only 1 to 6 nats below the hot ones: skipping them is not free.
    q, k, v = heavy_tailed_inputs(1, 2048, 2048, 4, 2, 64, hot_fraction=0.05, drop=(1.0, 6.0))
    print("budget  sparsity  bound of the worst row  guaranteed")
    for budget in (None, 0.1, 0.01):
        result = blasst_attn_func(
            q,
            k,
            v,
            causal=True,
            threshold=0.2,
            max_skipped_mass=budget,
            return_counts=True,
            return_mass_bound=True,
        )
        worst = result.mass_bound.max().item()
        limit = "nothing" if budget is None else f"{budget / (1 + budget):.4f}"
        print(f"{budget!s:6}  {result.counts.sparsity.item():8.3f}  {worst:22.4f}  {limit}")


if __name__ == "__main__":
    main()

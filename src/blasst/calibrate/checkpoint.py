"""A model's config.json with its `sparse_attention_config`: copied, or written over where asked for."""

from __future__ import annotations

import json
from pathlib import Path

from blasst.calibrate.interchange import (
    CONFIG_KEY,
    SparseAttentionConfig,
    read_config,
    read_sparse_attention_config,
)
from blasst.core.errors import ProfileError


def checkpoint_config(config: SparseAttentionConfig, path: str | Path) -> str:
    """The text of a model's config.json with the nested form in it; every other field stays, in its order.

    Args:
        config: what to put in. An older skip-softmax section is replaced.
        path: the config.json, or its folder; it is not changed.

    Raises:
        ProfileError: the file cannot be read or is no JSON object, or it holds another sparsity scheme, which
            would be lost.
    """
    content = read_config(path)
    if CONFIG_KEY in content:
        try:
            read_sparse_attention_config(content)
        except ProfileError as error:
            raise ProfileError(
                f"{path}: found a {CONFIG_KEY} that is not skip softmax alone ({error}), wanted none; "
                "take it out first if it may go"
            ) from error
    content[CONFIG_KEY] = config.to_json()
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_sparse_attention_config(
    config: SparseAttentionConfig, path: str | Path, *, source: str | Path | None = None
) -> None:
    """Write the nested form as a file of its own, or into a copy of a model's config.json.

    The file appears whole or not at all.

    Args:
        config: what to write.
        path: file to write. One that exists is a model's config.json and keeps its other fields.
        source: config.json, or its folder, to copy; None = the file at path, if there is one.

    Raises:
        ProfileError: see `checkpoint_config`.
    """
    path = Path(path)
    if source is None and path.exists():
        source = path
    text = json.dumps({CONFIG_KEY: config.to_json()}, indent=2, allow_nan=False) + "\n"
    if source is not None:
        text = checkpoint_config(config, source)
    replace_file(path, text)


def replace_file(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()  # a checkpoint's file may be a link into a store
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    if path.exists():
        beside.chmod(path.stat().st_mode)
    beside.replace(path)

"""Test equipment: stands where SGLang 0.5.23, on a machine without a GPU, looks for one function of vLLM."""

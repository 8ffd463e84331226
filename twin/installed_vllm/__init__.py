"""The scheduler class of the vLLM that is installed, driven without a model and without a device."""

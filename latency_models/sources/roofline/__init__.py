"""Step times from data sheets: a model, a device, and the shares of its peaks that kernels reach."""

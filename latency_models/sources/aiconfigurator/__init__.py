"""Step times from the kernel tables that ai-dynamo/aiconfigurator publishes: `layout`, `tables`, `kernels`, `spec`."""

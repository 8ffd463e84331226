"""Step times from the file of `twin calibrate run`."""

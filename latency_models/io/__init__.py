"""Reading and writing files: YAML with strict schemas, CSV tables, built-in files, and one-line error messages."""

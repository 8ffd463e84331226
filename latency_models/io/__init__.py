"""Reading and writing files: YAML with strict schemas, CSV tables, built-in files, and one-line error messages.

    config_io          YAML files checked against pydantic models
    yaml_limits        bounds on size, nesting and values, checked before YAML is built
    validation_errors  one-line messages from pydantic's errors
    tables             CSV tables, gzipped or plain
    builtin_files      calibrations, hardware and models that the package ships

Import from the modules: this package loads none of them.
"""

"""Papers computed again: a folder each, with scenarios as YAML, published tables as CSV, and a program.

`reproduction` computes a paper's document, `report` shows it; `quality` and `quality_report` do so for claims about
accuracy, on small models that are trained here. The rest of the house does not import this package: `twin reproduce`
loads a paper when it is asked for.
"""

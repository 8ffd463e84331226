"""Papers computed again: a folder each, with scenarios as YAML, published tables as CSV, and a program.

`reproduction` computes a paper's document and shows it; `quality` does so for claims about accuracy, on small models
that `training` trains here. The rest of the house does not import this package: `twin reproduce`
loads a paper when it is asked for.
"""

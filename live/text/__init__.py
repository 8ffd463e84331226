"""Text to token ids and back. Nothing here knows of models or of engines.

tokenizer   the tokenizer of a directory         chat    conversations as text, by the directory's templates
stream      an answer's text, token by token     stops   stop strings in a text that comes in parts
pieces      what each token writes               files   JSON beside a model, special tokens by name
fast_encoder, probes   a faster encoder, and the texts on which it has to agree first
"""

"""Text to token ids and back. This package knows neither models nor engines.

tokenizer      the tokenizer of a directory        chat          conversations as text, by chat templates
stream         output text, token by token         stop_strings  stop strings in a text that comes in parts
detokenizer    the bytes of tokens, incrementally  files         JSON files beside a model, special tokens by name
fast_encoder   a faster encoder                    tokenizer_check  texts on which two encoders must agree
"""

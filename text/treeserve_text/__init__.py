"""Between tokens and text: tokenizer, chat template, incremental detokenizer, stop strings. No torch."""

"""Starting policies: the demo's tokenizer, its tiny model and the supervised warm-up."""

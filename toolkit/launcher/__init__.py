"""Starting the ranks of a machine, watching them, and telling of those that fail."""

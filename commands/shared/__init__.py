"""What several commands share: options, inputs, tables, progress."""

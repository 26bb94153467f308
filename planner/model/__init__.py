"""What a model file holds: header, tensor table, roles of tensors, layers, units."""

"""Read files whose content is data: JSON and tensors."""

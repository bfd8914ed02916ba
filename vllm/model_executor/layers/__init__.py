"""Layers that models are made of. Each can be split over a group of tensor-parallel ranks."""

"""Layers that models are made of; parallel over a group of ranks, one rank being ordinary."""

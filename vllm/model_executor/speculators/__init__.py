"""Networks that guess next tokens from hidden states of the model."""

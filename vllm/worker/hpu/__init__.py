"""The worker of a Gaudi card, real or simulated."""

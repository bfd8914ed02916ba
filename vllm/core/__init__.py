"""Scheduling and KV block accounting: pure logic, no torch, no device, no text."""

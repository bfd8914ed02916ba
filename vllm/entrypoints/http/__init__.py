"""HTTP for all APIs of the server: routes with bodies, limits, errors, streams of events."""

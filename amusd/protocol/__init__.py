"""The protocol: two state machines and their messages. No torch, clock, thread, socket, randomness or logging."""

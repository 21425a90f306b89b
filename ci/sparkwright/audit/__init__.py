"""What a wheel really holds: libraries, machine code, opcodes."""

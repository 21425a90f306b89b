"""How a tree becomes a wheel: tools, arch rules, plan, compiling, wheels."""

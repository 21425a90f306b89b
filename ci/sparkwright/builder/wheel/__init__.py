"""
Wheels: reading and writing archives, the graft, labels and bills of materials.
"""

"""
Wheels: reading and writing archives, the graft, the build backends, labels and bills of materials.
"""

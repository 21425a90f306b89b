"""Three miniature upstreams, taken through every stage."""

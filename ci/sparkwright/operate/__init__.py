"""Running what was published: serving from an installed set, images, the machine that gates, upkeep, and pages about it all."""

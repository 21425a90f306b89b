"""Results of the throughput gate as a page, as Markdown for a release, and in a terminal."""

"""The site: static pages of releases, speeds, patches and workflow runs; and the record of a run."""

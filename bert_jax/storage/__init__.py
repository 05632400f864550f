"""Files and folders on a disk or in a bucket: paths, checksums, locks, atomic replacement."""

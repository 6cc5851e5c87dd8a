"""What board this is and what it measures: sysfs, proc, NVML and the vendor's tools. What cannot be read is None."""

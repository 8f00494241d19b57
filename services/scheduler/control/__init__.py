"""The imperative shell: takes reports and calls, decides with the core, commits through the store."""

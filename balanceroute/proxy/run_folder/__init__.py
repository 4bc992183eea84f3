"""The files that the processes of one router share: locks, counts and operators' changes, for those that come after."""

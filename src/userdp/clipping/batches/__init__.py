"""Users into batches.

cohort          the way in: a cohort into batches, and users too large for one in pieces
users           a batch of users: whose rows are whose, weights, padding
equal           batches in which all users have the same number of rows
ragged          batches in which users have different numbers of rows, in few shapes
joined_records  several records of a user in one row
"""

"""What training sees of a data set: rows with their blocks, statistics, and views of both."""

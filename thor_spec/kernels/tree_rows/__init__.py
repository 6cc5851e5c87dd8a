"""What a step is told of its requests' trees, by row of its batch; and whose outputs the drafter reads afterwards."""

"""Complete trainings, compared by recipe, and the time that training loses to loading."""

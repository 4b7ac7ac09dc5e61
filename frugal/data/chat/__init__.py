"""Conversations to text: templates, their sandbox, and where each answer and each escaped token is in the text."""

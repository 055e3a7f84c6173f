"""Writing to a stream: the import of exported epochs. docs/glossary.md plans the rest of the room."""

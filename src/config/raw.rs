//! What the user wrote.

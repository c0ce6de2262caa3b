//! Tests of the documents, of the reference, and of every command line that they and the help show.

mod book;
mod command_lines;
mod reference;

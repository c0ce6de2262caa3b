//! Requests as the log shows them.

use std::fmt;

use ferry_wire::blk::Request;

/// A request, for people.
pub(crate) struct RequestText(pub(crate) Request);

impl fmt::Debug for RequestText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Request::Read { offset, bytes } => write!(f, "Read {bytes} bytes from byte {offset}"),
            Request::Write { offset, bytes } => write!(f, "Write {bytes} bytes from byte {offset}"),
            Request::Flush => f.write_str("Flush"),
            Request::Id { .. } => f.write_str("Id"),
            Request::Discard { ranges } => write!(f, "Discard {ranges} ranges"),
            Request::WriteZeroes { ranges } => write!(f, "WriteZeroes {ranges} ranges"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_shown_with_their_place() {
        for (request, text) in [
            (Request::Read { offset: 512, bytes: 4096 }, "Read 4096 bytes from byte 512"),
            (Request::Write { offset: 0, bytes: 512 }, "Write 512 bytes from byte 0"),
            (Request::Flush, "Flush"),
            (Request::Id { bytes: 20 }, "Id"),
            (Request::Discard { ranges: 2 }, "Discard 2 ranges"),
            (Request::WriteZeroes { ranges: 1 }, "WriteZeroes 1 ranges"),
        ] {
            assert_eq!(format!("{:?}", RequestText(request)), text);
        }
    }
}

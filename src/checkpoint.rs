//! Checkpoints: what a handler notes down for a later attempt, as bytes.
//!
//! One version byte, then JSON, which other languages can read and people can look at.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::CheckpointError;

/// The version of the format.
const VERSION: u8 = 1;

/// The longest checkpoint, in bytes of its JSON. It is kept in the record, which scripts copy with
/// every renewal: room for identifiers and the name of a step, not for documents.
pub(crate) const MAX: usize = 16 << 10;

pub(crate) fn encode<T: Serialize + ?Sized>(state: &T) -> Result<Bytes, CheckpointError> {
    let mut bytes = vec![VERSION];
    serde_json::to_writer(&mut bytes, state).map_err(CheckpointError::Encode)?;
    let length = bytes.len() - 1;
    if length > MAX {
        return Err(CheckpointError::TooLarge { length, max: MAX });
    }
    Ok(bytes.into())
}

/// `None` if nothing was noted down.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &Bytes) -> Result<Option<T>, CheckpointError> {
    match bytes.split_first() {
        None => Ok(None),
        Some((&VERSION, json)) => {
            serde_json::from_slice(json).map(Some).map_err(CheckpointError::Decode)
        }
        Some(_) => Err(CheckpointError::Version),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_down_is_read_back() {
        let bytes = encode(&("charged", 7_u32)).unwrap();
        assert_eq!(&bytes[..], b"\x01[\"charged\",7]");
        assert_eq!(decode::<(String, u32)>(&bytes).unwrap(), Some(("charged".to_owned(), 7)));
        assert_eq!(decode::<u32>(&Bytes::new()).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_read_or_kept_is_refused_by_name() {
        let other = Bytes::from_static(b"\x021");
        assert!(matches!(decode::<u32>(&other), Err(CheckpointError::Version)));
        let text = encode("seven").unwrap();
        assert!(matches!(decode::<u32>(&text), Err(CheckpointError::Decode(_))));
        let long = "x".repeat(MAX);
        let error = encode(&long).unwrap_err();
        assert_eq!(error.to_string(), "a checkpoint of 16386 bytes; at most 16384 are kept");
        assert!(encode(&long[2..]).is_ok());
    }
}

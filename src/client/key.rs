//! The key of an operation: the one that is given, or a new one; always exactly one header line.

use http::{HeaderMap, HeaderName, Method};

use super::error::{ClientError, ClientErrorKind};
use crate::key::{IdempotencyKey, KeyError, KeySyntax};

/// Where keys come from.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Keys {
    /// A POST or PATCH without a key gets a new one.
    #[default]
    Make,
    /// Only requests that bring a key have one.
    OnlyGiven,
}

/// Finds or makes the key of a request, and sets its header to it.
pub(super) fn settle(
    method: &Method,
    headers: &mut HeaderMap,
    name: &HeaderName,
    keys: Keys,
) -> Result<Option<IdempotencyKey>, ClientError> {
    let mut lines = headers.get_all(name).iter();
    let key = match (lines.next(), lines.next()) {
        (Some(_), Some(_)) => Err(KeyError::Repeated),
        (Some(line), None) => {
            // Left as it is written: the caller knows which notation the server wants.
            return IdempotencyKey::parse(line.as_bytes(), KeySyntax::BareOrQuoted)
                .map(Some)
                .map_err(bad_key);
        }
        (None, _) => {
            let needs_one = matches!(*method, Method::POST | Method::PATCH);
            Ok((needs_one && keys == Keys::Make).then(IdempotencyKey::random))
        }
    };
    let key = key.map_err(bad_key)?;
    if let Some(key) = &key {
        headers.insert(name, key.to_header_value());
    }
    Ok(key)
}

fn bad_key(error: KeyError) -> ClientError {
    ClientError::before_sending(ClientErrorKind::BadKey(error), None, None)
}

//! The stored response: what is kept of an answer, and the bytes it is kept as.

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{StatusCode, response};
use prost::Message;
use prost::encoding::{WireType, encode_varint, encoded_len_varint};

/// An answer as it is kept for replays: status, the headers that belong to the result, the body.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StoredResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: StoredBody,
}

/// The body of a stored response, or the fact that it was not kept.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum StoredBody {
    /// The body's bytes.
    Kept(Bytes),
    /// It was too large or a stream. The operation is done; its answer cannot be given again.
    NotKept,
}

/// Why bytes are no stored response.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The format's version is not one that this release reads.
    #[error("unknown version {0} of the stored response")]
    Version(u8),
    /// There are no bytes at all.
    #[error("the stored response is empty")]
    Empty,
    /// The bytes are damaged.
    #[error("the stored response is damaged")]
    Damaged(#[source] Option<prost::DecodeError>),
}

/// The version that this release writes.
const VERSION: u8 = 1;

#[derive(Clone, PartialEq, Message)]
struct Wire {
    #[prost(uint32, tag = "1")]
    status: u32,
    #[prost(message, repeated, tag = "2")]
    headers: Vec<WireHeader>,
    #[prost(bool, tag = "4")]
    body_not_kept: bool,
    #[prost(bytes = "bytes", tag = "5")]
    body: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct WireHeader {
    #[prost(bytes = "bytes", tag = "1")]
    name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

impl StoredResponse {
    /// What is kept of an answer with this head and body.
    #[must_use]
    pub fn new(head: &response::Parts, body: Bytes, rules: &HeaderRules) -> Self {
        let headers = rules.kept(&head.headers);
        Self { status: head.status, headers, body: StoredBody::Kept(body) }
    }

    /// What is kept of an answer whose body is not: its status and where the result is.
    #[must_use]
    pub fn without_body(head: &response::Parts) -> Self {
        let mut headers = HeaderMap::new();
        if let Some(location) = head.headers.get(header::LOCATION) {
            headers.insert(header::LOCATION, location.clone());
        }
        Self { status: head.status, headers, body: StoredBody::NotKept }
    }

    /// The status of the original.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The headers that were kept.
    #[must_use]
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The body, or that it was not kept.
    #[must_use]
    pub fn body(&self) -> &StoredBody {
        &self.body
    }

    /// The headers, for marks that are the layer's.
    #[cfg(feature = "admin")]
    pub(crate) fn headers_mut(&mut self) -> &mut HeaderMap {
        &mut self.headers
    }

    /// Takes the response apart.
    #[must_use]
    pub fn into_parts(self) -> (StatusCode, HeaderMap, StoredBody) {
        (self.status, self.headers, self.body)
    }

    /// The bytes that a store keeps.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let body = match &self.body {
            StoredBody::Kept(body) => Some(&body[..]),
            StoredBody::NotKept => None,
        };
        encode(self.status, &self.headers, |_| true, body)
    }

    /// The bytes of [`new`](Self::new), without making the response first.
    pub(crate) fn encoded(head: &response::Parts, body: &[u8], rules: &HeaderRules) -> Bytes {
        let hops = hops(&head.headers);
        let keeps = |name: &HeaderName| rules.keeps(name, &hops);
        encode(head.status, &head.headers, keeps, Some(body))
    }

    /// Reads what [`encode`](Self::encode) wrote. The body shares the bytes' memory.
    ///
    /// # Errors
    /// [`CodecError`] if the version is unknown or the bytes are damaged.
    pub fn decode(mut bytes: Bytes) -> Result<Self, CodecError> {
        match bytes.first() {
            None => return Err(CodecError::Empty),
            Some(&VERSION) => {}
            Some(&other) => return Err(CodecError::Version(other)),
        }
        let wire = Wire::decode(bytes.split_off(1)).map_err(|e| CodecError::Damaged(Some(e)))?;
        let damaged = || CodecError::Damaged(None);
        let status = u16::try_from(wire.status).map_err(|_| damaged())?;
        let status = StatusCode::from_u16(status).map_err(|_| damaged())?;
        let mut headers = HeaderMap::with_capacity(wire.headers.len());
        for line in wire.headers {
            let name = HeaderName::from_bytes(&line.name).map_err(|_| damaged())?;
            let value = HeaderValue::from_maybe_shared(line.value).map_err(|_| damaged())?;
            headers.append(name, value);
        }
        let body = match wire.body_not_kept {
            true => StoredBody::NotKept,
            false => StoredBody::Kept(wire.body),
        };
        Ok(Self { status, headers, body })
    }
}

/// Writes what [`Wire`] says, straight from where it is: this is done once for every answer. `None`: a body that is not
/// kept.
fn encode(
    status: StatusCode,
    headers: &HeaderMap,
    keeps: impl Fn(&HeaderName) -> bool,
    body: Option<&[u8]>,
) -> Bytes {
    let header = |name: &HeaderName, value: &HeaderValue| {
        field_length(name.as_str().len()) + field_length(value.len())
    };
    // Of all of them: a little more than is needed where some are not kept.
    let length_of_headers: usize =
        headers.iter().map(|(name, value)| field_length(header(name, value))).sum();
    let body_length = match body {
        Some(body) => field_length(body.len()),
        None => 2,
    };
    // The version, and a status, which takes a tag and at most two bytes.
    let mut bytes = BytesMut::with_capacity(4 + length_of_headers + body_length);
    bytes.put_u8(VERSION);
    prost::encoding::uint32::encode(1, &u32::from(status.as_u16()), &mut bytes);
    for (name, value) in headers.iter().filter(|(name, _)| keeps(name)) {
        put_start(2, header(name, value), &mut bytes);
        put_field(1, name.as_str().as_bytes(), &mut bytes);
        put_field(2, value.as_bytes(), &mut bytes);
    }
    match body {
        Some(body) => put_field(5, body, &mut bytes),
        None => prost::encoding::bool::encode(4, &true, &mut bytes),
    }
    bytes.freeze()
}

/// A field of so many bytes, with a tag of one byte and its length; an empty one is left out.
fn field_length(length: usize) -> usize {
    if length == 0 { 0 } else { 1 + encoded_len_varint(length as u64) + length }
}

/// The tag of a field of bytes: all numbers here are small, so it is one byte.
const fn tag(number: u8) -> u8 {
    (number << 3) | WireType::LengthDelimited as u8
}

fn put_field(number: u8, value: &[u8], bytes: &mut BytesMut) {
    if !value.is_empty() {
        put_start(number, value.len(), bytes);
        bytes.put_slice(value);
    }
}

/// A field's tag and length.
fn put_start(number: u8, length: usize, bytes: &mut BytesMut) {
    match u8::try_from(length) {
        // As most are, in one piece.
        Ok(length @ ..0x80) => bytes.put_slice(&[tag(number), length]),
        Ok(_) | Err(_) => {
            bytes.put_u8(tag(number));
            encode_varint(length as u64, bytes);
        }
    }
}

/// The headers that `Connection` names.
fn hops(headers: &HeaderMap) -> Vec<String> {
    // Few answers have one, and to look at a few names costs less than a hash of it.
    if !headers.keys().any(|name| name == header::CONNECTION) {
        return Vec::new();
    }
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect()
}

/// Which response headers are kept for replays.
///
/// Everything is, except what belongs to the exchange and not to the result: hop-by-hop headers
/// and those that `Connection` names (RFC 9110, 7.6.1), `Content-Length` (made anew), cookies,
/// challenges and credentials, `Date`, `Age`, `Server-Timing`, `Access-Control-*`, rate limits,
/// request and trace ids (W3C, B3 and those of AWS), and the headers of this layer.
#[derive(Clone, Debug, Default)]
pub struct HeaderRules {
    also_kept: Vec<HeaderName>,
    also_dropped: Vec<HeaderName>,
}

impl HeaderRules {
    /// Keeps this header although the rules above would drop it. Hop-by-hop headers,
    /// `Content-Length` and the headers of this layer are never kept.
    #[must_use]
    pub fn keep(mut self, name: HeaderName) -> Self {
        self.also_kept.push(name);
        self
    }

    /// Drops this header.
    #[must_use]
    pub fn drop(mut self, name: HeaderName) -> Self {
        self.also_dropped.push(name);
        self
    }

    fn kept(&self, headers: &HeaderMap) -> HeaderMap {
        let hops = hops(headers);
        let mut kept = HeaderMap::with_capacity(headers.len());
        for (name, value) in headers {
            if self.keeps(name, &hops) {
                kept.append(name.clone(), value.clone());
            }
        }
        kept
    }

    fn keeps(&self, name: &HeaderName, hops: &[String]) -> bool {
        // What nearly all answers have is not looked for in lists where nobody asks for anything else.
        if hops.is_empty() && self.also_dropped.is_empty() && KEPT_MOSTLY.contains(name) {
            return true;
        }
        let text = name.as_str();
        if hops.iter().any(|hop| hop == text)
            || NEVER_KEPT.contains(&text)
            || self.also_dropped.contains(name)
        {
            return false;
        }
        let of_the_exchange = NOT_KEPT.contains(&text)
            || NOT_KEPT_PREFIXES.iter().any(|prefix| text.starts_with(prefix));
        !of_the_exchange || self.also_kept.contains(name)
    }
}

/// Not in the lists below, as a test says.
const KEPT_MOSTLY: [HeaderName; 2] = [header::CONTENT_TYPE, header::LOCATION];

/// Kept under no setting: they would make a replay false or break the connection it goes over.
const NEVER_KEPT: &[&str] = &[
    "connection",
    "content-length",
    "idempotency-key",
    "idempotency-status",
    "idempotent-replayed",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// They describe the first exchange, or were made for the first caller's session.
const NOT_KEPT: &[&str] = &[
    "age",
    "authentication-info",
    "authorization",
    "b3",
    "csrf-token",
    "date",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "request-id",
    "server-timing",
    "set-cookie",
    "set-cookie2",
    "traceparent",
    "traceresponse",
    "tracestate",
    "www-authenticate",
    "x-amzn-trace-id",
    "x-correlation-id",
    "x-csrf-token",
    "x-request-id",
    "x-trace-id",
    "x-xsrf-token",
];

const NOT_KEPT_PREFIXES: &[&str] =
    &["access-control-", "ratelimit", "x-b3-", "x-rate-limit", "x-ratelimit"];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head(status: u16, headers: &[(&'static str, &'static str)]) -> response::Parts {
        let mut response = http::Response::builder().status(status).body(()).unwrap();
        for (name, value) in headers {
            response.headers_mut().append(*name, HeaderValue::from_static(value));
        }
        response.into_parts().0
    }

    #[track_caller]
    fn kept(
        rules: &HeaderRules,
        headers: &[(&'static str, &'static str)],
    ) -> Vec<(String, String)> {
        let stored = StoredResponse::new(&head(200, headers), Bytes::new(), rules);
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        stored.headers().iter().map(|(name, value)| (name.to_string(), text(value))).collect()
    }

    #[test]
    fn what_is_mostly_kept_is_dropped_where_somebody_asks_for_it() {
        for name in KEPT_MOSTLY {
            assert!(!NEVER_KEPT.contains(&name.as_str()) && !NOT_KEPT.contains(&name.as_str()));
            assert!(!NOT_KEPT_PREFIXES.iter().any(|prefix| name.as_str().starts_with(prefix)));
            let rules = HeaderRules::default();
            assert!(rules.keeps(&name, &[]));
            assert!(!rules.keeps(&name, &[name.as_str().to_owned()]));
            assert!(!rules.drop(name.clone()).keeps(&name, &[]));
        }
    }

    #[test]
    fn headers_of_the_result_are_kept_with_number_and_order() {
        let result = [
            ("content-type", "text/csv"),
            ("etag", "\"1\""),
            ("location", "/p/1"),
            ("link", "</a>"),
            ("link", "</b>"),
            ("content-disposition", "attachment"),
            ("content-encoding", "gzip"),
            ("vary", "accept-encoding"),
            ("x-application", "yes"),
        ];
        let expect: Vec<_> = result.map(|(n, v)| (n.to_owned(), v.to_owned())).into();
        assert_eq!(kept(&HeaderRules::default(), &result), expect);
    }

    #[test]
    fn headers_of_the_exchange_are_not_kept() {
        let exchange = [
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("date", "now"),
            ("www-authenticate", "Basic"),
            ("access-control-allow-origin", "https://a.example"),
            ("x-ratelimit-remaining", "3"),
            ("ratelimit-policy", "10;w=1"),
            ("ratelimit", "limit=10"),
            ("x-request-id", "r"),
            ("connection", "X-Hop, close"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("idempotent-replayed", "true"),
            ("server-timing", "db;dur=1"),
        ];
        assert_eq!(kept(&HeaderRules::default(), &exchange), []);
    }

    /// A replay with the first exchange's trace would join two traces that have nothing in common.
    #[test]
    fn headers_of_a_trace_are_not_kept_unless_asked_for() {
        let trace = [
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("tracestate", "a=1"),
            ("b3", "80f198ee56343ba864fe8b2a57d3eff7-e457b5a2e4d86bd1-1"),
            ("x-b3-traceid", "80f198ee56343ba864fe8b2a57d3eff7"),
            ("x-b3-spanid", "e457b5a2e4d86bd1"),
            ("x-b3-parentspanid", "05e3ac9a4f6e3b90"),
            ("x-b3-sampled", "1"),
            ("x-b3-flags", "1"),
            ("x-amzn-trace-id", "Root=1-67891233-abcdef012345678912345678"),
        ];
        assert_eq!(kept(&HeaderRules::default(), &trace), []);
        let asked = HeaderRules::default().keep(HeaderName::from_static("x-b3-traceid"));
        let one = [("x-b3-traceid".to_owned(), "80f198ee56343ba864fe8b2a57d3eff7".to_owned())];
        assert_eq!(kept(&asked, &trace), one);
        // Names that only look like them are the application's.
        let own = [("b3-flavour", "mint"), ("x-b30", "yes")];
        assert_eq!(kept(&HeaderRules::default(), &own).len(), 2);
    }

    #[test]
    fn rules_can_be_changed_but_not_for_hop_by_hop_headers() {
        let rules = HeaderRules::default()
            .keep(header::SET_COOKIE)
            .keep(header::TRANSFER_ENCODING)
            .drop(header::ETAG);
        let given = [("set-cookie", "a=1"), ("transfer-encoding", "chunked"), ("etag", "\"1\"")];
        assert_eq!(kept(&rules, &given), [("set-cookie".to_owned(), "a=1".to_owned())]);
    }

    #[test]
    fn an_answer_without_its_body_keeps_status_and_location() {
        let head = head(201, &[("location", "/p/1"), ("content-type", "text/plain")]);
        let stored = StoredResponse::without_body(&head);
        let read = StoredResponse::decode(stored.encode()).unwrap();
        assert_eq!(read, stored);
        assert_eq!(read.status(), 201);
        assert_eq!(read.headers().len(), 1);
        assert_eq!(read.body(), &StoredBody::NotKept);
    }

    #[test]
    fn foreign_versions_and_damage_are_errors() {
        let decode = |bytes: &'static [u8]| StoredResponse::decode(Bytes::from_static(bytes));
        assert!(matches!(decode(b""), Err(CodecError::Empty)));
        assert!(matches!(decode(b"\x02abc"), Err(CodecError::Version(2))));
        assert!(matches!(decode(b"\x01\xff\xff"), Err(CodecError::Damaged(_))));
        assert!(matches!(decode(b"\x01"), Err(CodecError::Damaged(None)))); // no status
    }

    proptest! {
        #[test]
        fn a_response_survives_its_own_bytes(
            status in 100u16..=599,
            headers in prop::collection::vec(("[a-z-]{1,8}x", prop::collection::vec(0x20u8..0x7f, 0..20)), 0..8),
            body: Vec<u8>,
        ) {
            let body = Bytes::from(body);
            let mut response = http::Response::builder().status(status).body(()).unwrap();
            for (name, value) in headers {
                let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
                response.headers_mut().append(name, HeaderValue::from_bytes(&value).unwrap());
            }
            let (head, ()) = response.into_parts();
            let stored = StoredResponse::new(&head, body.clone(), &HeaderRules::default());
            let rules = HeaderRules::default();
            let encoded = StoredResponse::encoded(&head, &body, &rules);
            prop_assert_eq!(stored.encode(), encoded.clone());
            // As the format's library writes it, to the byte and without a byte too many.
            let headers = stored.headers.iter().map(|(name, value)| WireHeader {
                name: Bytes::copy_from_slice(name.as_str().as_bytes()),
                value: Bytes::copy_from_slice(value.as_bytes()),
            });
            let (status, headers) = (u32::from(status), headers.collect());
            let wire = Wire { status, headers, body_not_kept: false, body };
            prop_assert_eq!(&encoded[1..], wire.encode_to_vec());
            prop_assert_eq!(StoredResponse::decode(encoded).unwrap(), stored);
        }

        #[test]
        fn any_bytes_are_read_or_refused_without_a_panic(bytes: Vec<u8>) {
            let _ = StoredResponse::decode(bytes.into());
        }
    }
}

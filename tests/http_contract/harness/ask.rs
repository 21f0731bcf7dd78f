//! Requests as a client would write them, and answers as it sees them.

use axum::body::Body;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::Value;
use tower_idempotency::{Rejection, Replayed};

/// A request that can be sent again and again.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    method: Method,
    uri: String,
    headers: HeaderMap,
    body: Bytes,
}

pub(crate) fn method(method: Method, uri: &str) -> Ask {
    let mut headers = HeaderMap::new();
    headers.insert("account", HeaderValue::from_static("acme"));
    Ask { method, uri: uri.to_owned(), headers, body: Bytes::from_static(b"amount=100") }
}

pub(crate) fn post(uri: &str) -> Ask {
    method(Method::POST, uri)
}

pub(crate) fn patch(uri: &str) -> Ask {
    method(Method::PATCH, uri)
}

pub(crate) fn put(uri: &str) -> Ask {
    method(Method::PUT, uri)
}

pub(crate) fn delete(uri: &str) -> Ask {
    method(Method::DELETE, uri)
}

pub(crate) fn get(uri: &str) -> Ask {
    method(Method::GET, uri).body("")
}

impl Ask {
    /// With this value in `Idempotency-Key`, exactly as written.
    pub(crate) fn key(self, key: impl AsRef<[u8]>) -> Self {
        self.header("idempotency-key", key)
    }

    /// With one more line of this header.
    pub(crate) fn header(mut self, name: &'static str, value: impl AsRef<[u8]>) -> Self {
        let value = HeaderValue::from_bytes(value.as_ref()).unwrap();
        self.headers.append(HeaderName::from_static(name), value);
        self
    }

    /// With exactly one line of this header.
    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.insert(name, HeaderValue::from_str(value).unwrap());
        self
    }

    /// From this account; an empty one is nobody.
    pub(crate) fn by(self, account: &str) -> Self {
        self.with("account", account)
    }

    pub(crate) fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub(crate) fn request(&self) -> Request<Body> {
        self.request_with(Body::from(self.body.clone()))
    }

    pub(crate) fn request_with<B>(&self, body: B) -> Request<B> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.parse().unwrap();
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    rejection: Option<Rejection>,
    replayed: Option<Replayed>,
}

impl Seen {
    pub(crate) async fn read(response: Response<Body>) -> Self {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self {
            status: head.status,
            headers: head.headers,
            body,
            rejection: head.extensions.get().cloned(),
            replayed: head.extensions.get().copied(),
        }
    }

    #[track_caller]
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The only line of a header.
    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.headers.get_all(name).iter();
        let line = lines.next();
        assert!(lines.next().is_none(), "several lines of {name}: {:?}", self.headers);
        line.map(|value| value.to_str().unwrap())
    }

    /// The handler's own answer, made for this request.
    #[track_caller]
    pub(crate) fn fresh(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("idempotent-replayed"), None, "{self:?}");
        assert!(self.replayed.is_none() && self.rejection.is_none(), "{self:?}");
        self
    }

    /// An earlier answer, given again.
    #[track_caller]
    pub(crate) fn replayed(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("idempotent-replayed"), Some("true"), "{self:?}");
        assert!(self.replayed.is_some() && self.rejection.is_none(), "{self:?}");
        self
    }

    /// The answer `first`, given again: its status and its bytes.
    #[track_caller]
    pub(crate) fn replay_of(self, first: &Self) -> Self {
        assert_eq!(self.body, first.body);
        self.replayed(first.status.as_u16())
    }

    /// The layer's own answer. Whatever all of them have in common is checked here.
    #[track_caller]
    pub(crate) fn refused(self, status: u16, code: &str) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        let code = format!("idempotency_{code}");
        let problem = self.json();
        assert_eq!(problem["code"], code.as_str(), "{self:?}");
        assert_eq!(problem["status"], status);
        assert!(problem["type"].as_str().unwrap().starts_with("https://"));
        assert!(problem["type"].as_str().unwrap().ends_with(&code));
        assert!(!problem["title"].as_str().unwrap().is_empty());
        assert!(problem["safe_new_key"].is_boolean());
        assert_eq!(problem["error"]["code"], code.as_str());
        assert!(problem["error"]["type"].is_string() && problem["error"]["message"].is_string());
        assert_eq!(self.header(CONTENT_TYPE.as_str()), Some("application/problem+json"));
        assert_eq!(self.header(CACHE_CONTROL.as_str()), Some("no-store"));
        assert!(matches!(self.header("stripe-should-retry"), Some("true" | "false")));
        assert_eq!(self.header("idempotent-replayed"), None);
        if let Some(after) = self.header(RETRY_AFTER.as_str()) {
            assert!(after.parse::<u64>().unwrap() >= 1);
        }
        assert!(self.rejection.is_some(), "a layer outside finds the reason in the extensions");
        self
    }

    /// The whole seconds in `Retry-After`.
    #[track_caller]
    pub(crate) fn retry_after(&self) -> u64 {
        self.header(RETRY_AFTER.as_str()).expect("there is a Retry-After").parse().unwrap()
    }
}

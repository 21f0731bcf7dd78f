//! Who is calling. Stands outside the idempotency layer, so that a caller without a name never
//! gets as far as the store, and a revoked one never sees a stored answer.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde_json::json;
use tower_idempotency::{
    ErrorFlavour, IDEMPOTENCY_KEY, IdempotencyKey, Identity, KeySyntax, Scope,
};

/// The account of a request, and the connected account that it acts for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Account {
    name: Arc<str>,
    connected: Option<Arc<str>>,
}

const CONNECTED_ACCOUNT: &str = "stripe-account";

/// The idempotency scope: both names, never glued together.
pub(crate) fn scope() -> Scope {
    Scope::principal(|parts: &Parts| {
        let account = parts.extensions.get::<Account>()?;
        let connected = account.connected.as_deref();
        Some(Identity::of_parts([&*account.name].into_iter().chain(connected)))
    })
}

/// Puts the [`Account`] into the request's extensions, or answers 401.
pub(crate) async fn authenticate(
    State(flavour): State<ErrorFlavour>,
    mut request: Request,
    next: Next,
) -> Response {
    match Account::of(request.headers()) {
        Ok(account) => {
            request.extensions_mut().insert(account);
            next.run(request).await
        }
        Err(detail) => unauthorized(&request, flavour, detail),
    }
}

impl Account {
    fn of(headers: &HeaderMap) -> Result<Self, &'static str> {
        let credentials = single(headers, AUTHORIZATION.as_str())?.ok_or(
            "send `Authorization: Bearer sk_test_<account>`, or Basic with it as user name",
        )?;
        let name = secret_key(credentials)
            .as_deref()
            .and_then(account_of_key)
            .ok_or("the secret key must look like sk_test_<account>")?;
        let connected = match single(headers, CONNECTED_ACCOUNT)? {
            None => None,
            Some(id) if id.strip_prefix("acct_").is_some_and(is_name) => Some(Arc::from(id)),
            Some(_) => return Err("Stripe-Account must look like acct_<id>"),
        };
        Ok(Self { name, connected })
    }
}

/// As it stands in payments and in the ledger: `acme` or `acme/acct_x`. Names hold no slash.
impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.connected.iter().try_for_each(|connected| write!(f, "/{connected}"))
    }
}

/// The value of a header that may stand there once at most.
fn single<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, &'static str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| "a credential is not ASCII"),
        (Some(_), Some(_)) => Err("a credential is given twice"),
    }
}

fn secret_key(credentials: &str) -> Option<String> {
    let (scheme, value) = credentials.split_once(' ')?;
    let value = value.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        Some(value.to_owned())
    } else if scheme.eq_ignore_ascii_case("basic") {
        let decoded = String::from_utf8(STANDARD.decode(value).ok()?).ok()?;
        decoded.split_once(':').map(|(user, _)| user.to_owned())
    } else {
        None
    }
}

/// `sk_test_acme_1` and `sk_test_acme_2` are two keys of `acme`.
fn account_of_key(key: &str) -> Option<Arc<str>> {
    let account = key.strip_prefix("sk_test_")?.split('_').next()?;
    is_plain(account).then(|| Arc::from(account))
}

fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (1..=100).contains(&name.len()) && name.bytes().all(plain)
}

fn is_name(name: &str) -> bool {
    (1..=100).contains(&name.len()) && name.split('_').all(|part| part.is_empty() || is_plain(part))
}

fn unauthorized(request: &Request, flavour: ErrorFlavour, detail: &str) -> Response {
    let problem = json!({
        "type": "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.2",
        "title": "Not authenticated",
        "status": 401,
        "detail": detail,
        "code": "authentication_required",
        "safe_new_key": true,
        "error": {
            "type": "invalid_request_error",
            "code": "authentication_required",
            "message": detail,
        },
    });
    let (media_type, body) = match flavour {
        ErrorFlavour::Stripe => ("application/json", json!({ "error": problem["error"] })),
        ErrorFlavour::Problem | _ => ("application/problem+json", problem),
    };
    let headers = [
        ("content-type", media_type),
        ("cache-control", "no-store"),
        ("stripe-should-retry", "false"),
    ];
    let mut response = (StatusCode::UNAUTHORIZED, headers, body.to_string()).into_response();
    let challenge = HeaderValue::from_static("Bearer realm=\"payments\", Basic realm=\"payments\"");
    response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
    // The layer echoes the key on every answer to a keyed request; it was not asked here.
    if matches!(*request.method(), Method::POST | Method::DELETE)
        && let Ok(Some(key)) = single(request.headers(), IDEMPOTENCY_KEY.as_str())
        && let Ok(key) = IdempotencyKey::parse(key.as_bytes(), KeySyntax::BareOrQuoted)
    {
        response.headers_mut().insert(IDEMPOTENCY_KEY, key.to_header_value());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(authorization: &str, connected: Option<&str>) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, authorization.parse().unwrap());
        if let Some(connected) = connected {
            headers.insert(CONNECTED_ACCOUNT, connected.parse().unwrap());
        }
        Account::of(&headers).ok().map(|account| account.to_string())
    }

    #[test]
    fn the_account_is_what_stands_before_the_second_underscore() {
        for key in ["sk_test_acme", "sk_test_acme_1", "sk_test_acme_2_x", "sk_test_acme_"] {
            assert_eq!(shown(&format!("Bearer {key}"), None).as_deref(), Some("acme"), "{key}");
        }
        let basic = format!("Basic {}", STANDARD.encode("sk_test_acme_1:"));
        assert_eq!(shown(&basic, None).as_deref(), Some("acme"));
        assert_eq!(shown("bearer sk_test_A-1.b", None).as_deref(), Some("A-1.b"));
    }

    #[test]
    fn a_connected_account_is_part_of_it() {
        let bearer = "Bearer sk_test_acme";
        assert_eq!(shown(bearer, Some("acct_x")).as_deref(), Some("acme/acct_x"));
        for bad in ["x", "acct_", "acct_a/b", "acct_a b", ""] {
            assert_eq!(shown(bearer, Some(bad)), None, "{bad}");
        }
    }

    #[test]
    fn what_is_malformed_is_nobody() {
        for bad in [
            "Bearer",
            "Bearer ",
            "Bearer sk_live_acme",
            "Bearer sk_test_",
            "Bearer sk_test__1",
            "Bearer sk_test_a/b",
            "Basic !!!",
            "Digest sk_test_acme",
            "sk_test_acme",
        ] {
            assert_eq!(shown(bad, None), None, "{bad}");
        }
        let no_colon = format!("Basic {}", STANDARD.encode("sk_test_acme"));
        assert_eq!(shown(&no_colon, None), None);
        let mut twice = HeaderMap::new();
        twice.append(AUTHORIZATION, HeaderValue::from_static("Bearer sk_test_a"));
        twice.append(AUTHORIZATION, HeaderValue::from_static("Bearer sk_test_b"));
        assert!(Account::of(&twice).is_err());
    }
}

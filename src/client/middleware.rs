//! For reqwest, as a middleware of `reqwest-middleware`.

use async_trait::async_trait;
use http::{Extensions, Response};
use reqwest::{Body, Request, ResponseBuilderExt as _, Url};
use reqwest_middleware::{Error, Middleware, Next, Result};

use super::error::{ClientError, ClientErrorKind};
use super::policy::RetryPolicy;
use super::retry::{Operation, SendError, Sender, Sent, run};
use super::{key, observe};

/// Sends one operation as often as needed, under one key. See the [module](super) for what it does.
///
/// A failure is an [`Error::Middleware`]; [`ClientError::in_middleware`] takes the typed error out of it.
///
/// # Clone
/// Clones share the budget.
///
/// # Example
/// ```no_run
/// # async fn pay() -> Result<(), Box<dyn std::error::Error>> {
/// use reqwest_middleware::ClientBuilder;
/// use tower_idempotency::client::{Answered, RetryMiddleware, RetryPolicy};
///
/// let client = ClientBuilder::new(reqwest::Client::new())
///     .with(RetryMiddleware::new(RetryPolicy::new()))
///     .build();
/// let response = client.post("https://api.example/v1/payments").body("{}").send().await?;
/// if let Some(answered) = response.extensions().get::<Answered>() {
///     println!("{} tries, a replay: {}", answered.tries(), answered.is_replay());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryMiddleware {
    policy: RetryPolicy,
}

impl RetryMiddleware {
    /// A middleware with these rules.
    #[must_use]
    pub fn new(policy: RetryPolicy) -> Self {
        observe::describe();
        Self { policy }
    }

    /// The rules.
    pub fn policy(&self) -> &RetryPolicy {
        &self.policy
    }
}

#[async_trait]
impl Middleware for RetryMiddleware {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<reqwest::Response> {
        let policy = &self.policy;
        let method = request.method().clone();
        let is_given = request.headers().contains_key(&policy.key_header);
        let key = key::settle(&method, request.headers_mut(), &policy.key_header, policy.keys)
            .map_err(Error::middleware)?;
        if request.try_clone().is_none() {
            let kind = ClientErrorKind::StreamedBody;
            let given = key.filter(|_| is_given);
            return Err(Error::middleware(ClientError::before_sending(kind, given, None)));
        }
        let mut url = request.url().clone();
        let has_key = key.is_some();
        let operation = Operation { key, method };
        let tries = Tries { request, next, extensions, policy, url: &mut url, has_key };
        let response = run(policy, operation, tries).await.map_err(Error::middleware)?;
        let mut response = response.map(Body::wrap);
        // `reqwest` keeps the last URL of a response in a place of its own.
        let carrier = Response::builder().url(url).body(());
        if let Ok(carrier) = carrier {
            response.extensions_mut().extend(carrier.into_parts().0.extensions);
        }
        Ok(response.into())
    }
}

/// The same request, as often as it is wanted.
struct Tries<'a, 'n> {
    request: Request,
    next: Next<'n>,
    extensions: &'a mut Extensions,
    policy: &'a RetryPolicy,
    url: &'a mut Url,
    has_key: bool,
}

impl Sender for Tries<'_, '_> {
    type Body = Body;

    async fn send(&mut self) -> std::result::Result<Response<Body>, SendError> {
        let Some(request) = self.request.try_clone() else {
            let source = "the body can be read only once".into();
            return Err(SendError { sent: Sent::Never, source });
        };
        match self.next.clone().run(request, self.extensions).await {
            Ok(response) => {
                self.url.clone_from(response.url());
                Ok(response.into())
            }
            Err(error) => Err(judged(error, self.has_key, self.policy)),
        }
    }
}

fn judged(error: Error, has_key: bool, policy: &RetryPolicy) -> SendError {
    let sent = match &error {
        Error::Reqwest(error) if error.is_builder() || error.is_redirect() => Some(Sent::Never),
        // `reqwest` follows redirects within one try and does not say so: nobody may be where one led to,
        // after the request was received. Under a key that is no harm.
        Error::Reqwest(error) if error.is_connect() && !has_key => Some(Sent::Perhaps),
        Error::Reqwest(error) if error.is_connect() => Some(Sent::Nothing),
        Error::Reqwest(_) | Error::Middleware(_) => None,
    };
    let error = SendError::judged(error.into(), policy);
    SendError { sent: sent.unwrap_or(error.sent), ..error }
}

//! Fingerprint: a digest of what must not change when a key is sent again.
//!
//! It is SHA-256 (HMAC-SHA-256 with a secret) over a version byte and length-prefixed method,
//! concrete path, raw query, media type without parameters, chosen headers and the body's bytes.
//! Lengths come first everywhere, so that no two requests meet by moving bytes across a border.
//!
//! Bodies are compared byte for byte. A recipe may ask for more patience with JSON, forms and
//! multipart bodies; what cannot be read without losing anything is compared byte for byte still.
//!
//! How it is made is the **recipe**, and a record names the recipe of its fingerprint. So a deploy
//! that changes the recipe (another header, a new secret) gives no false mismatch as long as the
//! new configuration still [accepts](crate::ConfigBuilder::also_accept) the old one.

mod form;
mod json;
mod multipart;

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderName, HeaderValue};
use sha2::{Digest, Sha256};

#[cfg(feature = "json")]
pub use json::canonical_json;
pub use json::{JsonPointer, JsonPointerError};
pub(crate) use json::{Unreadable, read as read_json};

/// Names a recipe in a record: four bytes of a hash over everything that shapes the digest.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RecipeId([u8; 4]);

impl RecipeId {
    /// A recipe id from bytes, as read from a record.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 4]) -> Self {
        Self(bytes)
    }

    /// The bytes as they are stored.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 4] {
        &self.0
    }
}

/// A digest and the recipe it was made by.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct Fingerprint {
    recipe: RecipeId,
    digest: [u8; 32],
}

impl Fingerprint {
    /// A fingerprint from its stored form.
    #[must_use]
    pub const fn from_stored(recipe: RecipeId, digest: [u8; 32]) -> Self {
        Self { recipe, digest }
    }

    /// The recipe it was made by.
    #[must_use]
    pub const fn recipe(&self) -> RecipeId {
        self.recipe
    }

    /// The digest's bytes.
    #[must_use]
    pub const fn digest(&self) -> &[u8; 32] {
        &self.digest
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An unkeyed digest of a small body can be guessed at, so not even a part of it is shown.
        f.debug_struct("Fingerprint").field("recipe", &self.recipe).finish_non_exhaustive()
    }
}

/// How a request's fingerprint compares with a record's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Comparison {
    /// The same request.
    Same,
    /// Another request under the same key.
    Different,
    /// The record was made by a recipe that is not accepted any more: nobody can tell.
    UnknownRecipe,
}

/// One to four fingerprints of one request: by the current recipe, then by those still accepted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fingerprints {
    all: [Fingerprint; Self::MAX],
    count: usize,
}

impl Fingerprints {
    /// The most recipes that are computed for a request: the current one and three old ones.
    pub const MAX: usize = 4;

    /// One fingerprint, by the current recipe.
    #[must_use]
    pub const fn one(current: Fingerprint) -> Self {
        Self { all: [current; Self::MAX], count: 1 }
    }

    /// Adds a fingerprint by an older recipe. `false` if there is no room: nothing was added.
    #[must_use]
    pub fn push(&mut self, older: Fingerprint) -> bool {
        let free = self.count < Self::MAX;
        if free {
            self.all[self.count] = older;
            self.count += 1;
        }
        free
    }

    /// The one by the current recipe, which a new record gets.
    #[must_use]
    pub const fn current(&self) -> Fingerprint {
        self.all[0]
    }

    /// All of them, the current one first.
    #[must_use]
    pub fn as_slice(&self) -> &[Fingerprint] {
        &self.all[..self.count]
    }

    /// Compares with a record's fingerprint, by the record's recipe.
    #[must_use]
    pub fn compare(&self, recorded: Fingerprint) -> Comparison {
        match self.as_slice().iter().find(|mine| mine.recipe == recorded.recipe) {
            Some(mine) if mine.digest == recorded.digest => Comparison::Same,
            Some(_) => Comparison::Different,
            None => Comparison::UnknownRecipe,
        }
    }
}

/// Whether the order of query parameters matters.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum QueryOrder {
    /// The raw query counts, byte for byte.
    #[default]
    AsSent,
    /// Parameters are sorted by name first; those of one name keep their order, and nothing is decoded.
    ByName,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Content {
    Compared,
    Ignored,
}

/// A kind of body that is compared by what it says instead of by its bytes.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Read {
    #[cfg(feature = "json")]
    Json,
    Form,
    Multipart,
}

impl Read {
    /// In a recipe's id, where nothing else starts with a zero byte, which no header name holds.
    fn id(self) -> &'static [u8] {
        match self {
            #[cfg(feature = "json")]
            Self::Json => b"\0canonical json 1",
            Self::Form => b"\0canonical form 1",
            Self::Multipart => b"\0multipart 1",
        }
    }

    fn applies_to(self, media_type: &[u8]) -> bool {
        match self {
            #[cfg(feature = "json")]
            Self::Json => media_type == b"application/json" || media_type.ends_with(b"+json"),
            Self::Form => media_type == b"application/x-www-form-urlencoded",
            Self::Multipart => media_type.starts_with(b"multipart/"),
        }
    }
}

/// A field that is not compared, and whether there ever was one.
#[derive(Clone, Debug)]
struct Excluded {
    pointer: JsonPointer,
    watch: Arc<Watch>,
}

#[derive(Debug, Default)]
struct Watch {
    bodies: AtomicU32,
    matched: AtomicBool,
}

/// A pointer that matches none of so many bodies is most likely misspelt.
const WARN_AFTER: u32 = 100;

impl Excluded {
    /// Notes whether the field was there, and warns once if it never is.
    fn note(&self, matched: bool) {
        if matched {
            self.watch.matched.store(true, Ordering::Relaxed);
            return;
        }
        let bodies = self.watch.bodies.fetch_add(1, Ordering::Relaxed);
        if bodies.saturating_add(1) == WARN_AFTER && !self.watch.matched.load(Ordering::Relaxed) {
            tracing::warn!(
                pointer = self.pointer.as_str(),
                bodies = WARN_AFTER,
                "a field that is excluded from fingerprints was in no body so far: is it misspelt?"
            );
        }
    }
}

/// How a fingerprint is made. The default is right for payments.
///
/// # Example
/// ```
/// use http::HeaderName;
/// use tower_idempotency::Recipe;
///
/// let recipe = Recipe::new()
///     .header(HeaderName::from_static("stripe-version"))
///     .keyed("2026-11", b"a secret from your vault");
/// # let _ = recipe;
/// ```
#[derive(Clone)]
pub struct Recipe {
    headers: Vec<HeaderName>,
    query: QueryOrder,
    content: Content,
    read: Vec<Read>,
    excluded: Vec<Excluded>,
    key: Option<Key>,
    /// Made when it is asked for first; every change of the recipe begins without one.
    id: OnceLock<RecipeId>,
}

#[derive(Clone)]
struct Key {
    id: Arc<str>,
    mac: Hmac<Sha256>,
}

/// Changes when the same recipe would give another digest.
const FORMAT: u8 = 1;

impl Default for Recipe {
    fn default() -> Self {
        Self::new()
    }
}

impl Recipe {
    /// Method, path, query, media type and body.
    #[must_use]
    pub fn new() -> Self {
        Self {
            headers: Vec::new(),
            query: QueryOrder::AsSent,
            content: Content::Compared,
            read: Vec::new(),
            excluded: Vec::new(),
            key: None,
            id: OnceLock::new(),
        }
    }

    /// Compares nothing: whatever comes under a key gets the first answer. For clients whose
    /// retries differ by nature; a key reused by mistake is then never seen.
    #[must_use]
    pub fn ignoring_content() -> Self {
        Self { content: Content::Ignored, ..Self::new() }
    }

    /// Also compares this header (all its lines, in order), for example an API version.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        if !self.headers.contains(&name) {
            self.id.take();
            self.headers.push(name);
            self.headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        }
        self
    }

    /// Whether the order of query parameters matters.
    #[must_use]
    pub fn query_order(mut self, order: QueryOrder) -> Self {
        self.id.take();
        self.query = order;
        self
    }

    /// Compares JSON bodies by their canonical form (RFC 8785): the order of members, spacing and
    /// the notation of numbers and strings do not count, the order of arrays does. What has
    /// [no canonical form](crate::canonical_json) is compared byte for byte.
    #[cfg(feature = "json")]
    #[must_use]
    pub fn canonical_json(self) -> Self {
        self.reading(Read::Json)
    }

    /// Compares form bodies (`application/x-www-form-urlencoded`) by their fields: the order of
    /// names and the notation (`+` or `%20`) do not count, the order of equal names does. A body
    /// with a broken escape is compared byte for byte.
    #[must_use]
    pub fn canonical_form(self) -> Self {
        self.reading(Read::Form)
    }

    /// Compares multipart bodies by their parts, header lines and content in their order, without
    /// the boundary, which clients choose anew for each try. A body that is not put together
    /// exactly as RFC 2046 says is compared byte for byte.
    #[must_use]
    pub fn multipart_parts(self) -> Self {
        self.reading(Read::Multipart)
    }

    fn reading(mut self, read: Read) -> Self {
        if !self.read.contains(&read) {
            self.id.take();
            self.read.push(read);
            self.read.sort();
        }
        self
    }

    /// Does not compare this field of JSON bodies (and, one level deep, of forms), such as a time
    /// of sending that differs between tries. **Whatever is excluded may differ under one key.**
    ///
    /// It works on bodies that are read: with `canonical_json` and
    /// [`canonical_form`](Self::canonical_form). A pointer that was in none of the first hundred of
    /// them is warned of in the log, and listed by [`never_matched`](Self::never_matched).
    #[must_use]
    pub fn exclude(mut self, pointer: JsonPointer) -> Self {
        if self.excluded.iter().all(|excluded| excluded.pointer != pointer) {
            self.id.take();
            self.excluded.push(Excluded { pointer, watch: Arc::default() });
            self.excluded.sort_by(|a, b| a.pointer.as_str().cmp(b.pointer.as_str()));
        }
        self
    }

    /// The excluded fields that were in no body so far. Clones of a recipe count together.
    pub fn never_matched(&self) -> impl Iterator<Item = &JsonPointer> {
        let never = |excluded: &&Excluded| !excluded.watch.matched.load(Ordering::Relaxed);
        self.excluded.iter().filter(never).map(|excluded| &excluded.pointer)
    }

    /// True if whatever comes under a key is taken for the same.
    pub(crate) fn ignores_content(&self) -> bool {
        self.content == Content::Ignored
    }

    /// True if fields are excluded although no body is read that they could be in.
    pub(crate) fn excludes_in_vain(&self) -> bool {
        !self.excluded.is_empty() && self.read.iter().all(|read| *read == Read::Multipart)
    }

    /// Makes digests with a secret, so that whoever reads the store cannot try out card numbers
    /// against them. `key_id` names the secret and is not secret itself; a new secret needs a new id.
    ///
    /// # Panics
    /// Never: HMAC takes a secret of any length.
    #[must_use]
    pub fn keyed(mut self, key_id: impl Into<Arc<str>>, secret: &[u8]) -> Self {
        let mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes a key of any length");
        self.id.take();
        self.key = Some(Key { id: key_id.into(), mac });
        self
    }

    /// The id that records made by this recipe carry.
    #[must_use]
    pub fn id(&self) -> RecipeId {
        *self.id.get_or_init(|| self.make_id())
    }

    fn make_id(&self) -> RecipeId {
        let mut input = Input::Plain(Sha256::new());
        input.bytes(&[FORMAT, self.query as u8, self.content as u8]);
        input.sized(self.key.as_ref().map_or(b"", |key| key.id.as_bytes()));
        for name in &self.headers {
            input.sized(name.as_str().as_bytes());
        }
        for read in &self.read {
            input.sized(read.id());
        }
        for excluded in &self.excluded {
            input.sized(b"\0excluded");
            input.sized(excluded.pointer.as_str().as_bytes());
        }
        let digest = input.finish();
        RecipeId([digest[0], digest[1], digest[2], digest[3]])
    }

    /// The fingerprint of a request; `path` is the whole path, also inside a nested router.
    #[must_use]
    pub fn fingerprint(&self, parts: &Parts, path: &str, body: &Bytes) -> Fingerprint {
        Fingerprint { recipe: self.id(), digest: self.digest(parts, path, body) }
    }

    fn digest(&self, parts: &Parts, path: &str, body: &Bytes) -> [u8; 32] {
        let mut input = match &self.key {
            Some(key) => Input::Keyed(Box::new(key.mac.clone())),
            None => Input::Plain(Sha256::new()),
        };
        input.bytes(&[FORMAT]);
        if self.content == Content::Ignored {
            return input.finish();
        }
        input.sized(parts.method.as_str().as_bytes());
        input.sized(path.as_bytes());
        match (parts.uri.query(), self.query) {
            (None, _) => input.bytes(&[0]),
            (Some(query), QueryOrder::AsSent) => input.present(query.as_bytes()),
            (Some(query), QueryOrder::ByName) => input.present(sorted(query).as_bytes()),
        }
        match parts.headers.get(CONTENT_TYPE) {
            None => input.bytes(&[0]),
            Some(value) => input.present(&media_type(value)),
        }
        for name in &self.headers {
            let lines = parts.headers.get_all(name);
            input.bytes(&(lines.iter().count() as u64).to_be_bytes());
            lines.iter().for_each(|line| input.sized(line.as_bytes()));
        }
        self.body(&mut input, parts, body);
        input.finish()
    }

    /// The body's part of a digest. What is read and what is not are kept apart by their first byte.
    fn body(&self, input: &mut Input, parts: &Parts, body: &[u8]) {
        if self.read.is_empty() {
            return input.sized(body);
        }
        let content_type = parts.headers.get(CONTENT_TYPE);
        let essence = content_type.map(media_type).unwrap_or_default();
        let read = self.read.iter().find(|read| read.applies_to(&essence));
        let written = read.zip(content_type).is_some_and(|(read, content_type)| match read {
            #[cfg(feature = "json")]
            Read::Json => self.json(input, body),
            Read::Form => self.form(input, body),
            Read::Multipart => Self::multipart(input, content_type, body),
        });
        if !written {
            input.bytes(&[0]);
            input.sized(body);
        }
    }

    #[cfg(feature = "json")]
    fn json(&self, input: &mut Input, body: &[u8]) -> bool {
        let Some(mut document) = json::faithful(body) else { return false };
        for excluded in &self.excluded {
            excluded.note(excluded.pointer.remove(&mut document));
        }
        let Some(canonical) = json::canonical(&document) else { return false };
        input.bytes(&[1]);
        input.sized(&canonical);
        true
    }

    fn form(&self, input: &mut Input, body: &[u8]) -> bool {
        let Some(mut fields) = form::fields(body) else { return false };
        for excluded in &self.excluded {
            let before = fields.len();
            let name = excluded.pointer.field();
            fields.retain(|(field, _)| name.as_ref().is_none_or(|name| field != name.as_bytes()));
            excluded.note(fields.len() < before);
        }
        input.bytes(&[2]);
        input.bytes(&(fields.len() as u64).to_be_bytes());
        for (name, value) in &fields {
            input.sized(name);
            input.sized(value);
        }
        true
    }

    fn multipart(input: &mut Input, content_type: &HeaderValue, body: &[u8]) -> bool {
        let Some(parts) = multipart::parts(content_type, body) else { return false };
        input.bytes(&[3]);
        input.bytes(&(parts.len() as u64).to_be_bytes());
        for (headers, content) in parts {
            input.sized(headers);
            input.sized(content);
        }
        true
    }
}

impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recipe")
            .field("headers", &self.headers)
            .field("query", &self.query)
            .field("content", &self.content)
            .field("read", &self.read)
            .field(
                "excluded",
                &self.excluded.iter().map(|it| it.pointer.as_str()).collect::<Vec<_>>(),
            )
            .field("key_id", &self.key.as_ref().map(|key| &key.id))
            .finish()
    }
}

/// A hash that takes lengths before bytes.
enum Input {
    Plain(Sha256),
    Keyed(Box<Hmac<Sha256>>),
}

impl Input {
    fn bytes(&mut self, bytes: &[u8]) {
        match self {
            Self::Plain(hash) => Digest::update(hash, bytes),
            Self::Keyed(mac) => Mac::update(mac.as_mut(), bytes),
        }
    }

    fn sized(&mut self, bytes: &[u8]) {
        self.bytes(&(bytes.len() as u64).to_be_bytes());
        self.bytes(bytes);
    }

    fn present(&mut self, bytes: &[u8]) {
        self.bytes(&[1]);
        self.sized(bytes);
    }

    fn finish(self) -> [u8; 32] {
        match self {
            Self::Plain(hash) => hash.finalize().into(),
            Self::Keyed(mac) => mac.finalize().into_bytes().into(),
        }
    }
}

/// `type/subtype` in lower case; a charset or a boundary does not make another request.
fn media_type(value: &HeaderValue) -> Cow<'_, [u8]> {
    // What nearly all say, and it is looked at for each request.
    if value.as_bytes() == b"application/json" {
        return Cow::Borrowed(b"application/json");
    }
    let essence = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
    match essence.trim_ascii() {
        essence if essence.iter().any(u8::is_ascii_uppercase) => {
            essence.to_ascii_lowercase().into()
        }
        essence => essence.into(),
    }
}

fn sorted(query: &str) -> String {
    let mut pairs: Vec<&str> = query.split('&').collect();
    pairs.sort_by_key(|pair| pair.split('=').next().unwrap_or_default());
    pairs.join("&")
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn request(method: &str, uri: &str, content_type: Option<&str>) -> Parts {
        let mut builder = Request::builder().method(method).uri(uri);
        if let Some(content_type) = content_type {
            builder = builder.header(CONTENT_TYPE, content_type);
        }
        builder.body(()).unwrap().into_parts().0
    }

    fn of(
        recipe: &Recipe,
        method: &str,
        uri: &str,
        content_type: Option<&str>,
        body: &str,
    ) -> Fingerprint {
        let parts = request(method, uri, content_type);
        let path = parts.uri.path().to_owned();
        recipe.fingerprint(&parts, &path, &Bytes::copy_from_slice(body.as_bytes()))
    }

    #[test]
    fn every_part_counts_and_borders_do_not_move() {
        let recipe = Recipe::new();
        let json = Some("application/json");
        let all = [
            of(&recipe, "POST", "/a", json, "b"),
            of(&recipe, "PATCH", "/a", json, "b"),
            of(&recipe, "POST", "/ab", json, ""),
            of(&recipe, "POST", "/a", None, "b"),
            of(&recipe, "POST", "/a", Some("text/plain"), "b"),
            of(&recipe, "POST", "/a?", json, "b"),
            of(&recipe, "POST", "/a?a=&a=b&c=", json, "b"),
            of(&recipe, "POST", "/a?a=&b=c&b=", json, "b"),
            of(&recipe, "POST", "/a", json, "c"),
            of(&recipe, "POST", "/A", json, "b"),
            of(&recipe, "POST", "/a/", json, "b"),
            of(&recipe, "POST", "/%61", json, "b"),
        ];
        for (index, one) in all.iter().enumerate() {
            for other in &all[index + 1..] {
                assert_ne!(one.digest(), other.digest());
            }
        }
    }

    #[test]
    fn parameters_of_the_media_type_do_not_count() {
        let recipe = Recipe::new();
        assert_eq!(
            of(&recipe, "POST", "/a", Some("application/json"), "{}"),
            of(&recipe, "POST", "/a", Some("Application/JSON ; charset=utf-8"), "{}")
        );
    }

    #[test]
    fn query_order_is_ignored_only_where_asked_and_repeated_names_keep_theirs() {
        let by_name = Recipe::new().query_order(QueryOrder::ByName);
        let strict = Recipe::new();
        let of = |recipe: &Recipe, uri: &str| of(recipe, "POST", uri, None, "");
        assert_ne!(of(&strict, "/p?a=1&b=2"), of(&strict, "/p?b=2&a=1"));
        assert_eq!(of(&by_name, "/p?a=1&b=2"), of(&by_name, "/p?b=2&a=1"));
        assert_ne!(of(&by_name, "/p?a=1&a=2"), of(&by_name, "/p?a=2&a=1"));
        assert_ne!(of(&by_name, "/p?x=%41"), of(&by_name, "/p?x=A"));
    }

    #[test]
    fn chosen_headers_count_with_number_and_order() {
        let recipe = Recipe::new().header(HeaderName::from_static("api-version"));
        let with = |values: &[&str]| {
            let mut parts = request("POST", "/p", None);
            for value in values {
                parts.headers.append("api-version", HeaderValue::from_str(value).unwrap());
            }
            recipe.fingerprint(&parts, "/p", &Bytes::new())
        };
        assert_ne!(with(&[]), with(&["1"]));
        assert_ne!(with(&["1", "2"]), with(&["2", "1"]));
        assert_eq!(with(&["1"]), with(&["1"]));
    }

    #[cfg(feature = "json")]
    #[test]
    fn what_is_read_counts_by_what_it_says_and_only_for_its_own_media_type() {
        let patient = Recipe::new().canonical_json().canonical_form().multipart_parts();
        let of = |recipe: &Recipe, content_type: &str, body: &str| {
            *of(recipe, "POST", "/p", Some(content_type), body).digest()
        };
        let multipart = |boundary: &str, content: &str| {
            let body = format!("--{boundary}\r\na: b\r\n\r\n{content}\r\n--{boundary}--");
            let content_type = format!("multipart/form-data; boundary={boundary}");
            (of(&patient, &content_type, &body), of(&Recipe::new(), &content_type, &body))
        };
        for (content_type, one, same, other) in [
            ("application/json", r#"{"a":1,"b":2}"#, r#"{ "b": 2, "a": 1.0 }"#, r#"{"a":2,"b":1}"#),
            ("application/merge-patch+json", "[1, 2]", "[1,2]", "[2,1]"),
            ("application/x-www-form-urlencoded", "a=1+2&b=3", "b=3&a=1%202", "a=12&b=3"),
        ] {
            assert_eq!(of(&patient, content_type, one), of(&patient, content_type, same));
            assert_ne!(of(&patient, content_type, one), of(&patient, content_type, other));
            assert_ne!(
                of(&Recipe::new(), content_type, one),
                of(&Recipe::new(), content_type, same)
            );
            assert_ne!(of(&patient, "text/plain", one), of(&patient, "text/plain", same));
        }
        let (one, same, other) = (multipart("A", "x"), multipart("B", "x"), multipart("A", "y"));
        assert_eq!(one.0, same.0);
        assert!(one.0 != other.0 && one.1 != same.1);
        // Compared byte for byte: what a parser would lose.
        let lossy = [
            (r#"{"a":1,"a":2}"#, r#"{"a":2}"#),
            ("9007199254740993", "9007199254740992"),
            (r#"{"a":1,"a":2}"#, r#"{ "a":1,"a":2}"#),
        ];
        for (one, other) in lossy {
            let json = "application/json";
            assert_ne!(of(&patient, json, one), of(&patient, json, other), "{one} {other}");
            assert_eq!(of(&patient, json, one), of(&patient, json, one));
        }
    }

    #[cfg(feature = "json")]
    #[test]
    fn excluded_fields_may_differ_and_one_that_never_matches_is_known() {
        let pointer = JsonPointer::from_static;
        let recipe = Recipe::new()
            .canonical_json()
            .canonical_form()
            .exclude(pointer("/sent_at"))
            .exclude(pointer("/auth/token"))
            .exclude(pointer("/amuont"));
        let json = |body: &str| *of(&recipe, "POST", "/p", Some("application/json"), body).digest();
        let form = |body: &str| {
            *of(&recipe, "POST", "/p", Some("application/x-www-form-urlencoded"), body).digest()
        };
        let one = json(r#"{"amount":1,"sent_at":1,"auth":{"token":"a"}}"#);
        assert_eq!(one, json(r#"{"amount":1,"sent_at":2,"auth":{"token":"b"}}"#));
        assert_ne!(one, json(r#"{"amount":2,"sent_at":1,"auth":{"token":"a"}}"#));
        assert_eq!(form("amount=1&sent_at=1"), form("sent_at=2&amount=1"));
        assert_ne!(form("amount=1&sent_at=1"), form("amount=2&sent_at=1"));
        let never: Vec<_> = recipe.never_matched().map(JsonPointer::as_str).collect();
        assert_eq!(never, ["/amuont"]);
        assert!(!recipe.excludes_in_vain());
        assert!(Recipe::new().exclude(pointer("/a")).excludes_in_vain());
        assert!(Recipe::new().multipart_parts().exclude(pointer("/a")).excludes_in_vain());
    }

    #[cfg(feature = "json")]
    #[test]
    fn every_choice_has_an_id_of_its_own_and_the_order_of_choosing_does_not_count() {
        let pointer = JsonPointer::from_static;
        let all = [
            Recipe::new(),
            Recipe::ignoring_content(),
            Recipe::new().query_order(QueryOrder::ByName),
            Recipe::new().header(HeaderName::from_static("a")),
            Recipe::new().keyed("a", b"s"),
            Recipe::new().canonical_json(),
            Recipe::new().canonical_form(),
            Recipe::new().multipart_parts(),
            Recipe::new().canonical_json().canonical_form(),
            Recipe::new().canonical_json().exclude(pointer("/a")),
            Recipe::new().canonical_json().exclude(pointer("/b")),
            Recipe::new().canonical_json().exclude(pointer("/a")).exclude(pointer("/b")),
        ];
        for (index, one) in all.iter().enumerate() {
            for other in &all[index + 1..] {
                assert_ne!(one.id(), other.id(), "{one:?} {other:?}");
            }
        }
        let reversed = Recipe::new().exclude(pointer("/b")).exclude(pointer("/a")).canonical_json();
        assert_eq!(reversed.id(), all[11].id());
        // Pinned, since records outlive a release: what it was before there were other ways to read.
        assert_eq!(Recipe::new().id(), RecipeId([253, 27, 153, 87]));
    }

    #[test]
    fn a_secret_changes_the_digest_and_its_id_the_recipe() {
        let plain = Recipe::new();
        let first = Recipe::new().keyed("k1", b"secret");
        let second = Recipe::new().keyed("k2", b"secret");
        assert_ne!(plain.id(), first.id());
        assert_ne!(first.id(), second.id());
        let of = |recipe: &Recipe| *of(recipe, "POST", "/p", None, "{}").digest();
        assert_ne!(of(&plain), of(&first));
        assert_eq!(of(&first), of(&second));
    }

    #[test]
    fn the_comparison_goes_by_the_recipe_of_the_record() {
        let (new, old) = (Recipe::new().keyed("k", b"s"), Recipe::new());
        let mut mine = Fingerprints::one(of(&new, "POST", "/p", None, "1"));
        assert!(mine.push(of(&old, "POST", "/p", None, "1")));
        assert_eq!(mine.compare(of(&old, "POST", "/p", None, "1")), Comparison::Same);
        assert_eq!(mine.compare(of(&old, "POST", "/p", None, "2")), Comparison::Different);
        assert_eq!(mine.compare(of(&new, "POST", "/p", None, "1")), Comparison::Same);
        let gone = Recipe::new().header(HeaderName::from_static("x"));
        assert_eq!(mine.compare(of(&gone, "POST", "/p", None, "1")), Comparison::UnknownRecipe);
    }

    #[test]
    fn there_is_room_for_four_recipes() {
        let one = Fingerprint::from_stored(RecipeId::from_bytes([0; 4]), [0; 32]);
        let mut all = Fingerprints::one(one);
        assert!(all.push(one) && all.push(one) && all.push(one));
        assert!(!all.push(one));
        assert_eq!(all.as_slice().len(), Fingerprints::MAX);
    }

    #[test]
    fn ids_and_digests_are_pinned_because_records_outlive_a_release() {
        let recipe = Recipe::new();
        assert_eq!(recipe.id().as_bytes(), &PINNED_RECIPE);
        let digest = *of(&recipe, "POST", "/v1/payments", Some("application/json"), "{}").digest();
        assert_eq!(digest[..8], PINNED_DIGEST);
    }
    const PINNED_RECIPE: [u8; 4] = [253, 27, 153, 87];
    const PINNED_DIGEST: [u8; 8] = [113, 154, 152, 69, 3, 250, 187, 211];
}

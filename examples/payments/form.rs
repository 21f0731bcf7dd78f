//! Form-encoded bodies, as Stripe's clients send them.

use http::HeaderMap;

use crate::answer::ApiError;
use crate::payments::media_type;

/// The fields of a form. Names this sandbox does not know are read over, as they are at Stripe.
#[derive(Debug)]
pub(crate) struct Form(Vec<(String, String)>);

impl Form {
    pub(crate) fn parse(headers: &HeaderMap, body: &[u8]) -> Result<Self, ApiError> {
        // Stripe's clients send no type where there is nothing to send.
        let empty = body.is_empty();
        if !empty && media_type(headers) != "application/x-www-form-urlencoded" {
            let message = "the body must be application/x-www-form-urlencoded";
            return Err(ApiError::invalid("unsupported_media_type", message));
        }
        let fields = form_urlencoded::parse(body);
        Ok(Self(fields.map(|(name, value)| (name.into_owned(), value.into_owned())).collect()))
    }

    /// A field that may stand there once at most: of two amounts neither is meant.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>, ApiError> {
        let mut values = self.0.iter().filter(|(field, _)| field == name);
        match (values.next(), values.next()) {
            (None, _) => Ok(None),
            (Some((_, value)), None) => Ok(Some(value)),
            (Some(_), Some(_)) => {
                Err(ApiError::invalid("parameter_repeated", format!("{name} is given twice")))
            }
        }
    }

    /// A whole number, in digits.
    pub(crate) fn number(&self, name: &str) -> Result<Option<u32>, ApiError> {
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let refused = || {
                let message = format!("{name} must be a whole number");
                ApiError::invalid("parameter_invalid_integer", message)
            };
            text.parse().ok().filter(|_| digits).ok_or_else(refused)
        };
        self.text(name)?.map(number).transpose()
    }
}

#[cfg(test)]
mod tests {
    use http::header::CONTENT_TYPE;

    use super::*;

    fn form(body: &str) -> Result<Form, ApiError> {
        let form = "application/x-www-form-urlencoded; charset=utf-8".parse().unwrap();
        Form::parse(&HeaderMap::from_iter([(CONTENT_TYPE, form)]), body.as_bytes())
    }

    #[test]
    fn spaces_are_read_as_both_kinds_of_clients_write_them() {
        let (python, node) = (form("description=two+books"), form("description=two%20books"));
        for form in [python, node] {
            assert_eq!(form.unwrap().text("description").unwrap(), Some("two books"));
        }
    }

    #[test]
    fn a_number_is_digits_and_a_field_stands_there_once() {
        assert_eq!(form("amount=12&x[y]=1").unwrap().number("amount").unwrap(), Some(12));
        assert_eq!(form("").unwrap().number("amount").unwrap(), None);
        for bad in ["amount=", "amount=+1", "amount=1.0", "amount=5000000000", "amount=1&amount=1"]
        {
            assert!(form(bad).unwrap().number("amount").is_err(), "{bad}");
        }
        assert!(Form::parse(&HeaderMap::new(), b"amount=1").is_err());
        assert!(Form::parse(&HeaderMap::new(), b"").is_ok());
    }
}

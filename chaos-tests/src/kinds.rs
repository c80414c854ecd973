//! A macro for lists of kinds: enums whose variants have a name for the command line and a
//! description.

macro_rules! kinds {
    (
        $(#[$attribute:meta])*
        pub enum $Kind:ident;
        $($kind:ident $name:literal $what:literal;)*
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $Kind {
            $(#[doc = $what] $kind,)*
        }

        impl $Kind {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            /// Its name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }

            /// What it is.
            #[must_use]
            pub fn what(self) -> &'static str {
                match self { $(Self::$kind => $what,)* }
            }

            /// The kind of a name.
            ///
            /// # Errors
            /// With all names, when there is none of this one.
            pub fn named(name: &str) -> Result<Self, String> {
                let found = Self::ALL.iter().find(|kind| kind.name() == name);
                let names: Vec<_> = Self::ALL.iter().map(|kind| kind.name()).collect();
                found
                    .copied()
                    .ok_or_else(|| format!("expected one of {}", names.join(", ")))
            }
        }
    };
}

pub(crate) use kinds;

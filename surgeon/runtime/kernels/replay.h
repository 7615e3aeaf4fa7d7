// Calls that were recorded (recording.py), made again one after the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

constexpr int64_t kArguments = 16;  // room for them in every call

struct Call {
    void (*apply)(const int64_t *);
    int64_t arguments[kArguments];
};

// An argument as a recording keeps it: numbers of 8 bytes, among them addresses; a float in the lower half of one.
template <typename T>
static T argument(int64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_floating_point_v<T>) {
        static_assert(sizeof(T) == sizeof(int32_t));
        const int32_t bits = static_cast<int32_t>(word);
        T number;
        std::memcpy(&number, &bits, sizeof number);
        return number;
    } else {
        return word;
    }
}

template <typename... Types, size_t... kAt>
static void apply(void (*function)(Types...), const int64_t *words, std::index_sequence<kAt...>) {
    static_assert(sizeof...(Types) <= kArguments);
    function(argument<Types>(words[kAt])...);
}

template <typename... Types>
static void apply(void (*function)(Types...), const int64_t *words) {
    apply(function, words, std::index_sequence_for<Types...>{});
}
